"""What the papers published, beside what this project finds."""
