"""Tasks: data, the loss of one example, and metrics.

`base` says what a task is and `sources` where its data are found. `classes` and `target_loss` are the two kinds of losses: of a
class, and of the tokens of a target.
"""

from dpexp.tasks.base import DataInfo, Task, build_task

__all__ = ["DataInfo", "Task", "build_task"]
