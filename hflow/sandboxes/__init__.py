"""What runs programs and tools that are not trusted, and what confines them."""
