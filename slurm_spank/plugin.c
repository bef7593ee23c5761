/* The plugin as Slurm sees it: each entry point goes to the file of the context that it is called in. */
#include "everstep.h"

/* What Slurm looks up by name; all else stays inside the plugin. */
#pragma GCC visibility push(default)
#include <slurm/spank.h>

SPANK_PLUGIN(everstep, 1);
#pragma GCC visibility pop

struct config config;

int slurm_spank_init(spank_t spank, int ac, char **av)
{
	spank_context_t context = spank_context();

	if (context != S_CTX_LOCAL && context != S_CTX_ALLOCATOR && context != S_CTX_REMOTE)
		return 0;
	config_read(&config, ac, av);
	if (context == S_CTX_LOCAL)
		local_init();
	if (context == S_CTX_ALLOCATOR)
		allocator_init();
	return options_register(spank);
}

int slurm_spank_init_post_opt(spank_t spank, int ac, char **av)
{
	(void)spank, (void)ac, (void)av;
	switch (spank_context()) {
	case S_CTX_LOCAL:
		return local_options_read();
	case S_CTX_ALLOCATOR:
		return allocator_options_read();
	default:
		return 0;
	}
}

int slurm_spank_local_user_init(spank_t spank, int ac, char **av)
{
	(void)spank, (void)ac, (void)av;
	return local_step_made();
}

int slurm_spank_task_init(spank_t spank, int ac, char **av)
{
	(void)ac, (void)av;
	return remote_task(spank);
}

int slurm_spank_exit(spank_t spank, int ac, char **av)
{
	(void)spank, (void)ac, (void)av;
	if (spank_context() == S_CTX_LOCAL)
		local_exit();
	return 0;
}
