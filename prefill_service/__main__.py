"""`python -m prefill_service`: one prefill worker."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # at INFO its core tells of connections; read at its import
gc.disable()  # of 200,000 objects that imports make, none is garbage: looking through them is a sixth of a start

from prefill_service.service import PrefillService
from protos import tandem_worker_pb2 as pb
from worker_service.command import worker_command

gc.freeze()  # nor will it be: whatever looks for garbage later need not go through them, a quarter of a second
gc.enable()

main = worker_command(pb.Role.ROLE_PREFILL, "prefill", PrefillService)

if __name__ == "__main__":
    main(prog_name="python -m prefill_service")
