"""CPU time, memory and tightness of accounting, beside other libraries."""
