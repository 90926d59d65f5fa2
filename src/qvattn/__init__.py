"""qvattn: attention that stops paying for keys."""
