"""The core one step at a time: for replays of recordings, and for servers that answer while they simulate."""
