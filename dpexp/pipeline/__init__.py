"""A model in stages, one process for each: schedules of ``torch.distributed.pipelining``, clipped stage by stage."""
