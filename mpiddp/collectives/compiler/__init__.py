"""From a schedule to one rank's list of instructions."""
