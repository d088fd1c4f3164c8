"""What `tools/fuzz` hunts with: mutations of valid files, and the readers that get them."""
