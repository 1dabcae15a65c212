"""Commands for a live run: ``status``, ``logs``, ``stacks``, ``stop``. Each needs the folder of the run and nothing else."""
