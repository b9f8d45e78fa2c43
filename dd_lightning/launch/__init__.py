"""Runs whole experiments on this machine: a Hydra job starts plain processes and watches them.

`app` is the Hydra job, `settings` refuses wrong ones before anything starts, `run` starts, watches
and ends the processes; `learner` and `evaluator` are the processes' own main functions.
"""
