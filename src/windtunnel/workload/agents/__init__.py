"""Agents' sessions: the forms in which they are recorded or described, and AgentX, which replays them."""
