"""What a tile of the bundled attention kernels costs on a GPU: shared memory, registers, time.

The compiler says it to the byte, for a GPU that isn't there too; a model says it in microseconds.
"""
