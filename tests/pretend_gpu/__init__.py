"""A GPU that is not there: what the host does with one, tried on a machine without any.

    with pretend_gpu():                              torch.cuda says that there is a GPU, and `device="cuda"` works
        engine = LLMEngine(…)
        with without_waiting():                      whatever makes this thread wait for the device is an error
            engine.executor.launch(…)

Its tensors say that they are on `cuda:0`; their numbers lie in memory of the CPU, which computes them, so that tokens
can be compared. What a GPU would refuse, or would get wrong now and then, is an error here, or rubbish, every time:

    devices.py       which of several GPUs, where a process uses one and others the others
    memory.py        tensors, and who holds how much memory
    operations.py    an operation across devices; what makes the host wait; copies between host and device
    streams.py       streams, events, graphs: copies arrive as late as they may, a recording has no values
    races.py         what one stream uses while another may still write it, or the other way round
    triton.py        launches of Triton kernels: interpreted, or compiled as a launch would compile them
    flash.py         calls of FlashAttention
    nccl.py, ipc.py  what processes do together, and open of each other, where there are several
    nixl.py          what NIXL is told of their memory
    __main__.py      a worker process with such a GPU

Not seen here: what a real device computes, and how fast.
"""

from pretend_gpu.device import PretendGpu, pretend_gpu
from pretend_gpu.streams import without_waiting

__all__ = ["PretendGpu", "pretend_gpu", "without_waiting"]
