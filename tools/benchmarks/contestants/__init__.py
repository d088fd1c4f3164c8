"""What `train_speed.py` measures, one file each, each in a child process of its own.

A contestant is a function `train(task, turn)`: the training loop as its library's users write it.
It calls `turn.step_done` after every optimizer step, which holds it there between its turns.
"""
