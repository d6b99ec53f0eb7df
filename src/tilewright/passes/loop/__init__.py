"""Loop stage to loop stage, one kernel at a time: what to compute, in fewer and better-conditioned steps."""
