"""The syncer's process: Θ as a LightningModule, the job stream that feeds it, checkpoints, server.

`command` is `dd-lightning syncer`; `run` opens everything; `server` is the thread that drives the
sans-IO core; `module` and `merger` do the merges. `merger.Merger` says what memory they take.
"""
