"""Starting, guarding and ending processes."""
