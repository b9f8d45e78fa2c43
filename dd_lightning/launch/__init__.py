"""Runs whole experiments on this machine: a Hydra job starts plain processes and watches them.

`app` is the Hydra job, `settings` refuses wrong ones before anything starts, `run` starts, watches
and ends the processes. `family` holds them, `supervision` decides who is started again, `rejoins`
knows from the tape who is back, `resume` goes on with an earlier run. `learner` and `evaluator` are
the processes' own main functions, `leaving` is how a learner ends when it is told to.
"""
