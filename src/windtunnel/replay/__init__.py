"""A recorded workload through a scheduler, one step at a time, in the step records of the recorder."""
