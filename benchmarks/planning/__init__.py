"""Planning measured: searches against brute force, their speed, models under loads, and autoscalers over days."""
