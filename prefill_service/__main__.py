"""`python -m prefill_service`: one prefill worker."""

from __future__ import annotations

from rpc import starting

starting.before_imports(__name__)

from prefill_service.service import PrefillService
from protos import tandem_worker_pb2 as pb
from worker_service.command import worker_command

starting.after_imports()

main = worker_command(pb.Role.ROLE_PREFILL, PrefillService)

if __name__ == "__main__":
    main(prog_name="python -m prefill_service")
