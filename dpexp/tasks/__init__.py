"""Tasks: data, the loss of one example, and metrics."""

from dpexp.tasks.base import DataInfo, Task, build_task

__all__ = ["DataInfo", "Task", "build_task"]
