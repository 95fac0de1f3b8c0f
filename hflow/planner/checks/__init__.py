"""What is refused or warned about: settings without effect, layouts that cannot be, plans that cannot run."""
