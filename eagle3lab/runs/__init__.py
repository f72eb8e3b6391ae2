"""Run directories, caches, the papermill pipeline, sweeps, the report."""
