/* Another site plugin, for tests: it registers --container-image, as Pyxis does, and shows the value to the tasks. */
#include <slurm/spank.h>
#include <stdio.h>

SPANK_PLUGIN(image, 1);

static char image[256];

static int given(int value, const char *text, int remote)
{
	(void)value, (void)remote;
	snprintf(image, sizeof(image), "%s", text);
	return 0;
}

static struct spank_option option = { "container-image", "IMAGE", "run in this image", 1, 0, given };

int slurm_spank_init(spank_t spank, int ac, char **av)
{
	(void)ac, (void)av;
	return spank_option_register(spank, &option);
}

int slurm_spank_user_init(spank_t spank, int ac, char **av)
{
	(void)ac, (void)av;
	return image[0] ? spank_setenv(spank, "TEST_IMAGE", image, 1) : 0;
}
