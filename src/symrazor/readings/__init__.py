"""What was learned, in numbers, words and pictures."""
