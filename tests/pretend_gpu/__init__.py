"""A pretended GPU: tests how the host uses a GPU, on a machine without one.

    with pretend_gpu():                              torch.cuda reports a GPU, and `device="cuda"` works
        engine = LLMEngine(…)
        with without_waiting():                      anything that makes this thread wait for the device is an error
            engine.executor.launch(…)

Its tensors claim to be on `cuda:0`; their numbers lie in CPU memory and the CPU computes them, so that tests can
compare tokens. What a GPU would refuse, or would get wrong now and then, is an error or rubbish here every time:

    devices.py       which of several GPUs a process uses, while other processes use the others
    memory.py        tensors, and who holds how much memory
    operations.py    operations across devices; what makes the host wait; copies between host and device
    streams.py       streams, events, graphs: copies arrive as late as they may, a recording has no values
    races.py         memory that one stream uses while another may still write it, or the other way round
    triton.py        launches of Triton kernels: interpreted, or compiled as a launch would compile them
    flash.py         calls of FlashAttention
    nccl.py, ipc.py  collectives between several processes, and the memory that they open of each other
    nixl.py          what NIXL is told about their memory
    engines.py       small engines on it
    __main__.py      a worker process with a pretended GPU
    compile_launches.py  compiles what engines and the GPU benchmark launch on it

Not shown: what a real device computes, and how fast.
"""

from pretend_gpu.device import PretendGpu, pretend_gpu
from pretend_gpu.streams import without_waiting

__all__ = ["PretendGpu", "pretend_gpu", "without_waiting"]
