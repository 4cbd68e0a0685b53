"""A grant that does not fit its prompt is refused at the door, so that it cannot disturb what is computed beside it."""

from __future__ import annotations

import pytest

from prefill_service.prefill import check_grant_fits
from protos.tandem_kv_transfer_pb2 import Grant


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (16, 1), (17, 2), (32, 2)])
def test_one_that_fits(num_tokens: int, num_blocks: int) -> None:
    check_grant_fits(Grant(block_ids=range(num_blocks)), num_tokens, 16)
    check_grant_fits(Grant(block_ids=range(num_blocks), num_cached_blocks=num_blocks), num_tokens, 16)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 0), (17, 1), (16, 2)])
def test_one_that_does_not(num_tokens: int, num_blocks: int) -> None:
    with pytest.raises(ValueError, match="blocks"):
        check_grant_fits(Grant(block_ids=range(num_blocks)), num_tokens, 16)


def test_more_cached_than_there_are() -> None:
    with pytest.raises(ValueError, match="num_cached_blocks"):
        check_grant_fits(Grant(block_ids=[3], num_cached_blocks=2), 16, 16)
