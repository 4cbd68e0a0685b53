"""Runs compiled GPU kernels on a CPU: the PTX that Triton's compiler makes of them, instruction by instruction.

    program.py     the text as instructions
    memory.py      global and shared memory: bounds and alignment
    machine.py     a block of threads: control flow, barriers, loads, stores, copies that arrive as late as they may
    registers.py, computing.py, arithmetic.py  the threads' registers, and computation on them
    triton.py      launches of Triton kernels, compiled and run in this way

This shows what Triton's interpreter cannot: what the compiler makes of a kernel, its types and declared alignments;
unaligned vectors; copies that nobody waited for; a warp that reads what another one has not written yet or has
overwritten, since warps run in any order between barriers. Not shown: how a GPU's own assembler orders the
instructions, its tensor cores' last bits, and its speed.
"""
