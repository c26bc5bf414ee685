"""All that epsilon rests on for `fit` with Poisson sampling and Gaussian noise.

Read the files in this order; each imports only files above it. In brackets stands
whatever a file trusts besides JAX and NumPy.

1. `validate`: arguments have the right type and range. In 32 bits or more, too.
2. `arrays`: dtypes of at least float32; the axes on which arrays vary in `shard_map`.
3. `keys`: keys made from keys, so that no two draws share one. A checksum of all bits
   of a tree, equal on all devices.
4. `gradient`: the gradients of single examples, sealed: no arithmetic mixes examples
   before the clip. [engine: the squared norm of an example is never below the true
   one, and an example of weight zero leaves no trace in a weighted sum]
5. `clipped_sum`: a sum that is closed until the noise opens all of it, and carries the
   clip norm and the normalizer.
6. `per_example`: the gradient of an example depends on that example alone. [engine:
   factored gradients equal those of `jax.vmap(jax.grad(...))`, and a program that may
   mix examples is refused]
7. `clip`: an example moves the sum by at most C / B, whatever the rule, and padding or
   an example whose norm is not finite adds exactly zero.
8. `clipped_grad`: the same sum, a few examples at a time. [Optax: `microbatch`]
9. `noise`: independent Gaussian noise of the stated level on every coordinate, by a key
   that no other sum shares. [engine: `threefry.normals` draws as `jax.random.normal`]
10. `privatize`: clip and noise as one transformation, for batches as the mechanism
    draws them, with their mask.
11. `sampling`: each example is in a batch with the stated probability, independently of
    the others, and batches have a static shape.
12. `accounting`: an upper bound on the epsilon of an event, with the rounding of its
    grid. [dp-accounting, SciPy]
13. `calibrate`: no calibrated number exceeds its target.
14. `mechanism`: one frozen value gives the level, the event and the draw, so noise,
    sampler and accountant agree.
15. `spending`: runs on the same people's data compose.
16. `data`: examples come by the indices of a batch, from arrays or any source.
17. `step`: one step draws, clips, adds noise and updates; the optimizer sees the
    private gradient alone.
18. `identity`: a digest of mechanism, program, data and start; two runs that differ in
    it have different batches under one key.
19. `fit`: takes no step beyond the budget, and reports every step it may have taken.

The core calls the engine through two functions, `engine.transform.factored_outputs` and
`engine.threefry.normals`. Their references are `method="vmap"` and `jax.random.normal`,
with which `audit` compares them on your model. Besides these it knows a type of value,
`engine.interface.Gradient`, with `engine.weighted`; `engine.rounding`, the bound on how
far products round; `engine.modules`, which of a module's variables are trained;
`engine.leaves`, which data JAX takes, so that no error shows a row; `engine.names`,
which arguments have another name; `engine.memory` and
`engine.microbatches`, for how many examples are computed at once; `engine.mesh`, for
shardings; `engine.jaxprs`, which finds programs in a program; `engine.search`, which
finds a root. But for the bound and the choice of variables, they change a sum by
rounding alone, or no number at all.

Nothing here keeps state between calls, warns, or opens a file. No other folder can
weaken it: a mechanism is an event and a draw, and contrib's other noise vouches for its
own event.
"""
