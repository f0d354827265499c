"""Distillation of a teacher's soft answers into a student."""

import torch
from torch import Tensor

__all__ = ["knowledge_preserving"]


def knowledge_preserving(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 2.0) -> Tensor:
    """Temperature-scaled KL divergence from the teacher's answers to the student's.

    ``T² · KL(p_T ‖ p_S)`` with both distributions softened by the temperature T: the sum over classes, the
    mean over the batch. FedVQA Eq. (8.4) with the temperature and its square from Hinton et al., "Distilling
    the knowledge in a neural network" (2015). The divergence is evaluated in at least single precision. Only
    the student receives a gradient.

    Args:
        student_logits: shape (B, C).
        teacher_logits: shape (B, C); a class masked with minus infinity contributes nothing.
        temperature: T > 0; the ST row of FedVQA uses 2.

    Returns:
        A scalar.

    Raises:
        ValueError: the shapes differ, or the temperature is not positive.
    """
    if student_logits.shape != teacher_logits.shape or student_logits.ndim != 2:
        raise ValueError(
            "student_logits and teacher_logits must have one shape (B, C), got "
            f"{tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    precision = torch.promote_types(student_logits.dtype, torch.float32)
    log_student = torch.log_softmax(student_logits.to(precision) / temperature, dim=1)
    log_teacher = torch.log_softmax(teacher_logits.detach().to(precision) / temperature, dim=1)
    teacher = log_teacher.exp()
    # 0 · log 0 counts as 0, also where the student gives the class no probability either.
    gap = (log_teacher - log_student).masked_fill(teacher == 0, 0.0)
    return temperature**2 * (teacher * gap).sum(dim=1).mean()
