"""What is trained: one file a task. A task knows no rank, no Ray and no backend."""
