"""Plan: what to deploy. A search finds the deployments of a space that answer a question best."""
