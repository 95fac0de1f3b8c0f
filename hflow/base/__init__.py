"""What every room may import: errors, files, checked values, text for the terminal."""
