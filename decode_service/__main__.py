"""`python -m decode_service`: one decode worker."""

from __future__ import annotations

from rpc import starting

starting.before_imports(__name__)

from decode_service.service import DecodeService
from protos import tandem_worker_pb2 as pb
from worker_service.command import worker_command

starting.after_imports()

main = worker_command(pb.Role.ROLE_DECODE, DecodeService)

if __name__ == "__main__":
    main(prog_name="python -m decode_service")
