"""Who am I, which address, which device: from an MPI launch to a process group."""
