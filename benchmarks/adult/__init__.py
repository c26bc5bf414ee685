"""The UCI Adult benchmark: census income."""
