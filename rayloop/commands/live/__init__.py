"""Words about a run that goes on: ``status``, ``logs``, ``stacks``, ``stop``. Each needs the run's folder and nothing else."""
