"""Compiled kernels for GPUs, run on a CPU: the PTX that Triton's compiler makes of them, instruction by instruction.

    program.py     the text as instructions
    memory.py      global and shared memory: bounds, alignment, copies that arrive as late as they may
    machine.py     a block of threads: ways through the program, barriers, what they load, store and give each other
    registers.py, computing.py, arithmetic.py  what each of them has, and makes of it
    triton.py      launches of Triton kernels, compiled and run so

What Triton's interpreter cannot show is seen here: what the compiler makes of a kernel, of what is said to be aligned,
and of types; vectors that are not aligned; copies that nobody waited for; a warp that reads what another one has not
written yet, or has written over, since warps go on in any order between barriers. Not seen: how a machine's own
assembler orders all this, its tensor cores' last bits, and how fast it is.
"""
