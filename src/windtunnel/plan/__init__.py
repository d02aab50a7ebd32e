"""Plan: what to deploy. A space is searched for the deployment that answers a question best."""
