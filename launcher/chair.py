"""Taking the coordinator's chair: everything that it needs, put together from an agent's post."""

from __future__ import annotations

import os
from functools import partial

import zmq
import zmq.asyncio
from everstep.launcher.coordinator import Coordinator
from everstep.launcher.jobside import JobSide, restart_count
from everstep.launcher.keys import Keys
from everstep.launcher.ladder import parse_policy
from everstep.launcher.membership import Config, RecruitFailed
from everstep.launcher.post import Post, mentions_everstep, rank_environment
from everstep.launcher.voice import say
from everstep.recovery.errors import UsageError

GATHER = 300.0
"""Seconds for all agents to introduce themselves."""


def take_the_chair(post: Post, context: zmq.asyncio.Context, keys: Keys) -> Coordinator:
    """A coordinator that listens. Raises UsageError where it cannot."""
    chair: list[Coordinator] = []
    job: JobSide | None = None
    fruitless = 0

    def failed(news: RecruitFailed) -> None:
        chair[0].notice(news)

    if post.client is not None and post.terms is not None:
        job = JobSide(post.client, post.here.job_id, post.terms, failed, say)
        fruitless = job.begin(post.folder, restart_count(), post.options.events)
    config = Config(
        nnodes=post.nnodes,
        nproc=post.spec.nproc_per_node,
        environment=partial(rank_environment, post),
        standby=post.options.standby,
        spare_nodes=post.options.spare_nodes,
        max_restarts=post.spec.max_restarts,
        expects_recovery=mentions_everstep(post.spec.script),
        token=lambda: os.urandom(32),
        allowed=parse_policy(post.options.resume_policy),
        in_job=job is not None and post.here.job_id > 0,
        can_requeue=post.here.can_requeue,
        why_not=post.here.why_not,
        attempts=fruitless,
        grace=post.options.grace,
    )
    coordinator = Coordinator(context, keys, config, post.options.heartbeat, post.options.events, job)
    chair.append(coordinator)
    try:
        if post.listener >= 0:
            coordinator.adopt(post.listener)
        else:
            coordinator.bind(post.bind, post.coordinator[1])
    except zmq.ZMQError as error:
        raise UsageError(
            f"port {post.coordinator[1]} of {post.node} cannot be used for the coordinator ({error}): "
            "start the run again, which takes another one"
        ) from error
    return coordinator
