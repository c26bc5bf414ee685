"""SmolLM2-135M, a pretrained language model, privately fine-tuned on E2E."""
