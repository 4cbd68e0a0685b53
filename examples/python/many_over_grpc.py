"""Sends many requests at once over gRPC, with deadlines, and retries those for which there is no room.

python many_over_grpc.py [ADDRESS]
"""

import asyncio
import sys

from tandem import AsyncClient, Overloaded

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"


async def ask(client: AsyncClient, number: int) -> str:
    prompt = [{"role": "user", "content": f"What is {number} plus {number}?"}]
    for _ in range(5):
        try:
            answer = await client.generate(prompt, max_tokens=24, temperature=0, timeout_s=30)
        except Overloaded as error:  # the router refused it, and says when to retry
            await asyncio.sleep(error.retry_after_s or 1)
        else:
            timings = answer.timings
            who = f"{timings.prefill_worker or timings.decode_worker} -> {timings.decode_worker}"
            return f"{number:>2}: {answer.text!r} ({who}, first token after {timings.time_to_first_token_ms:.0f} ms)"
    return f"{number:>2}: no room in five tries"


async def main() -> None:
    async with AsyncClient(address) as client:
        for line in await asyncio.gather(*(ask(client, number) for number in range(1, 9))):
            print(line)


asyncio.run(main())
