"""Parts of a process that know no MPI: output, listeners, directories, outcomes, waiting."""
