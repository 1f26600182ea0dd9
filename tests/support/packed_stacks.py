"""Packs stacks of experts in memory."""


def quantize_stack(experts, weight, stack):
    """Packs a stack as the library's module holds it, one expert at a time."""
    for index in range(len(stack)):
        matrix = stack[index].T if experts.is_transposed else stack[index]
        weight.set_matrix(index, weight.form.quantize(matrix))
