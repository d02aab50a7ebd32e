"""What prompts share: whose tokens each begins with, and how much a cache could find of them."""
