"""All that epsilon rests on for `fit` with Poisson sampling and Gaussian noise.

It is this folder and `engine`, which computes gradients. Read them in this order; each
file of `core` imports only files above it, and those of `engine`. Brackets list a
file's dependencies other than JAX and NumPy.

The layout of a run. These files change a sum by rounding alone, or no number at all:

1. `leaves`: refuses data that JAX does not take; no error shows a row.
2. `modules`: selects the trained variables of a Flax NNX module.
3. `mesh`: the shardings of a run on several devices.
4. `microbatches`: a function of a batch, a few examples at a time; each example counts
   once. [Optax: `microbatch`]

From examples to a private gradient:

5. `validate`: arguments have the right type and range. Floating-point arrays must have
   at least 32 bits.
6. `arrays`: dtypes of at least float32; the axes on which arrays vary in `shard_map`.
7. `threefry`: the block function of JAX's default generator.
8. `chacha`: a kind of key of 256 bits, whose generator is a cipher.
9. `keys`: keys made from keys, so that no two draws share one. A checksum of all bits
   of a tree, equal on all devices.
10. `gradient`: the gradients of single examples, sealed: no arithmetic mixes examples
   before the clip.
11. `clipped_sum`: a sum that is closed until the noise opens all of it, and carries the
   clip norm and the normalizer.
12. `per_example`: the gradient of an example depends on that example alone.
13. `clip`: an example moves the sum by at most C / B, whatever the rule, and padding or
    an example whose norm is not finite adds exactly zero.
14. `clipped_grad`: the same sum, a few examples at a time.
15. `normals`: standard normal numbers of 128 random bits, by a quantile in float64.
16. `grid`: a noised sum lies on a public grid, so that epsilon holds for the bits, by a
    proof with constants.
17. `noise`: independent Gaussian noise of the stated level on every coordinate, by a
    key that no other sum shares.

From the private gradient to a run and its epsilon:

18. `sampling`: each example is in a batch with the stated probability, independently of
    the others, and batches have a static shape.
19. `accounting`: an upper bound on the epsilon of an event, with the rounding of its
    grid. [dp-accounting, SciPy]
20. `mechanism`: one frozen value gives the level, the event and the draw, so noise,
    sampler and accountant agree.
21. `privatize`: clip and noise as one transformation, for batches as the mechanism
    draws them, with their mask.
22. `spending`: runs on the same people's data compose.
23. `data`: examples come by the indices of a batch, from arrays or any source.
24. `step`: one step draws, clips, adds noise and updates; the optimizer sees the
    private gradient alone. The key of its batches depends on everything known to
    change rounding.
25. `identity`: a digest of mechanism, program, data and start; two runs that differ in
    it have different batches under one key.
26. `programs`: a compiled program is found by all that its compiler was given, never by
    a function.
27. `fit`: takes no step beyond the budget, and reports every step it may have taken.

The engine. Its reference is `method="vmap"`, with which `audit` compares it on your
model. These files inspect and restrict the program of a loss:

* `engine.jaxprs`: finds programs in a program.
* `engine.collectives`: refuses a loss that sums over devices or over examples.
* `engine.isolation`: operations that would read another example see one alone.

The forms of a gradient, each with a squared norm that is never below the true one:

* `engine.precision`: dtypes, and the norm that rounding can hide.
* `engine.rounding`: the bound on how far products round.
* `engine.interface`: the interface that every form implements.
* `engine.forms`: the gradient itself, blocks with zeros around, and sums of forms.
* `engine.product`: gradients of kernels in matrix products.
* `engine.convolution`: gradients of kernels in convolutions.
* `engine.lookup`: gradients of embedding tables.
* `engine.view`: a form with its entries moved.

From the program of a loss to forms, and to a sum:

* `engine.rules`: maps each operation to the form that it makes or keeps.
* `engine.program`: which variables may stay in a form.
* `engine.scan`: loops.
* `engine.evaluate`: runs the program of the gradient on forms.
* `engine.transform`: gradients of each example, in their forms.
* `engine.weighted`: per-example norms, and weighted sums in which an example of weight
  zero contributes exactly zero.

Nothing here warns, opens a file, or keeps state between calls but for the results of
pure functions. No other folder can weaken it: a mechanism is an event and a draw, and
contrib's other noise vouches for its own event.
"""
