"""What OpenAI clients ask and are answered: bodies read and checked, words, shapes and documents."""
