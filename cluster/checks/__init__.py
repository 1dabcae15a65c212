"""What ``doctor`` looks at: small functions that take what they look at as arguments and return findings."""
