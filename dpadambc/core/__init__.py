"""What every other package stands on; none of it is public."""
