"""`scd-trt doctor`: is this machine, and this pair of machines, ready to move codes? Answered by doing, where that can be."""
