"""The training entrypoint that runs inside a job's Ray cluster."""
