"""``keepstep run`` as an observer: another launcher starts and replaces the ranks, and this process
sees what happens, writes it down, says when it is enough, and leaves nothing running."""
