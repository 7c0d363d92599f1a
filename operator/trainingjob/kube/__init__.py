"""A thin asynchronous client of the Kubernetes API, on the official one's connection."""
